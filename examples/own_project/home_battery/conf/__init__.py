"""Configurations; Hydra finds them through `hydra_plugins/home_battery_search_path.py`."""
