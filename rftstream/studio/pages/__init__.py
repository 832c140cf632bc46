"""The pages of the studio. `page` has what those of one run have in common."""
