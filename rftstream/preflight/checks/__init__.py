"""The checks of `rftstream check`: `check` calls all the others, and `check_report` shows their findings."""
