"""An older name of the template model composer, which configurations may still use."""

from __future__ import annotations

from maze.perception.models.template_model_composer import TemplateModelComposer

DefaultModelComposer = TemplateModelComposer
