"""Parts of the environment checker, see :mod:`maze.utils.check_env`."""
