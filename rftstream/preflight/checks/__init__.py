"""`rftstream check`, finding by finding: `check` asks all the others, and `check_report` says what they found."""
