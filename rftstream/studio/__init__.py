"""The studio: web pages about one or several runs. It only lays out and serves the results of `queries`.

- `watched_run` follows one run in a thread, and answers questions about its log in another - `charts` panels of curves
as data for a browser and as pictures for one without scripts - `pages.run_pages`, `pages.rollout_pages`,
`pages.many_pages` one function for each page - `rendering` the templates, and the words and forms that they use -
`access` access rights: tokens, roles, sessions - `guard` checks on every request: host, origin, limits, headers -
`events` notifies browsers of changes in a run - `app` puts these together; `server` listens

To add a page: a function in one of the modules of pages, its template, and a line in the table ROUTES of `app`.
"""
