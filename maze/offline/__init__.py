"""Learn from logged decisions, and estimate what a policy would have achieved, without a simulator."""
