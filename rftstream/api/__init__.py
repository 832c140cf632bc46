"""The Python API: a run as an object. `rftstream.PUBLIC` names what of it is public.

It is a skin over `queries` and `launch`, as the commands are: nothing is counted, read or started here in a way of its
own. Modules in the order of reading:

    run        opens a run; the class `Run`
    looking    its tables, with their filters
    acting     starts, stops and continues it, and makes other runs of it
    versions   a version as a model that answers
    reports    its reports, which the commands print
    tables     a lazy table, and the frames that are made of it
    rollouts   rollouts, with their bodies and tokens
    final_rows the columns of rollouts that do not change any more, as a file beside the index
    frames, html, on_log
"""
