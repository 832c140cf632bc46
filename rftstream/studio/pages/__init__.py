"""The pages of the studio. `page` has the common parts of the pages of one run."""
