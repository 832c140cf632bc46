"""The operators that a run file declares, and tasksets that grow by them."""
