"""Any Hugging Face causal language model as a policy.

The explorer drives `policy`. `opening` and `model` load and hold the model. `batch`, `cache`, `packed`, `prompts` and
`turns` hold what is decoded. `attention`, `linear` and `row` compute it.
"""
