"""The service loops `single` and `concurrent`, and the modules that they share."""
