"""Rollouts as rows of data sets that other programs read: `forms` makes the rows, `writing` a folder of them."""
