"""Configurations; Hydra finds them through `hydra_plugins/stockroom_search_path.py`."""
