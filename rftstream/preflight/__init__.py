"""Checks before a run starts: whether it will work, fit into the machine, and learn.

In the order of reading:

    plan, readiness           the preparation for every use of a run's config, and the list of requirements
    folder_choice             the choice of the run folder
    checks.check, checks.check_report  `rftstream check`: the run file, its data, prompts and rewards; its report
    checks.check_environments, checks.check_rewards, checks.templates, checks.advice
                              the single checks, and settings that are worth another look
    trial, trial_run          `rftstream try`: a few problems that are sampled and scored for real
    memory, estimate          how large the model is, and how much memory and disk the run takes
    doctor                    `rftstream doctor`: whether this machine is fit for a run

To add a check: a function that returns findings, called in `check`, and its test.
"""
