"""Problems of logistics."""
