"""RLlib brings absl's logging, which closes the stream it has found first when Hydra sets up logging anew.

Outside of tests that is the real one, which it leaves alone; here it would be what pytest captures into.
"""

from __future__ import annotations

import sys

from absl import logging as absl_logging

absl_logging.get_absl_handler().python_handler.setStream(sys.__stderr__)
