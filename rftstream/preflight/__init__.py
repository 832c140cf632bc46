"""What can be known of a run before it starts: whether it will work, fit and learn.

In the order of reading:

    plan, readiness           what every use of a run's config begins with, and the list of what has to be there
    folder_choice             which run folder is meant
    checks.check, checks.check_report  `rftstream check`: the run file, its data, prompts and rewards; its report
    checks.check_environments, checks.check_rewards, checks.templates, checks.advice
                              the single checks, and settings that are worth another look
    trial, trial_run          `rftstream try`: a few problems that are sampled and scored for real
    memory, estimate          how large the model is, and how much memory and disk the run takes
    doctor                    `rftstream doctor`: whether this machine is fit for a run

To add a check: a function that returns findings, called in `check`, and its test.
"""
