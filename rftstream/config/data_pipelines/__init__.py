"""The operators that a run file declares, and the tasksets that grow by new problems."""
