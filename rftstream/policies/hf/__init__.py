"""Any Hugging Face causal language model as a policy.

`policy` is what the explorer drives, `opening` and `model` load and hold the model, `batch`, `cache`, `packed`,
`prompts` and `turns` are what is decoded, `attention`, `linear` and `row` how it is computed.
"""
