"""Reads training scripts of TRL without running them."""
