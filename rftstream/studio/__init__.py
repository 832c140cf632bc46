"""The studio: a web page over one run or many. A skin over `queries`: it reads, lays out and serves, and no more.

- `watched_run`  follows one run in a thread, and answers questions about its log in another
- `charts`       panels of curves as data for a browser and as pictures for one without scripts
- `pages.run_pages`, `pages.rollout_pages`, `pages.many_pages`   one function for each page
- `rendering`    the templates, and the words and forms that they use
- `access`       who may look: tokens, roles, sessions
- `guard`        what every request passes: host, origin, limits, headers
- `events`       tells browsers that a run has gone on
- `app`          puts these together; `server` listens

To add a page: a function in one of the modules of pages, its template, and a line in the table ROUTES of `app`.
"""
