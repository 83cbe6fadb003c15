"""Multi-class queueing networks with published optima."""
