"""Problems of robotics."""
