"""People's feedback on rollouts, as pure functions of the log.

selection    which rollouts people are asked about
votes        how one question stands, by the votes of distinct annotators
agreement    how far annotators agree
fold         what became of each record of `feedback`, one judgement for each
"""
