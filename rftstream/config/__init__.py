"""The run file: how it is read, which settings it has, and how the parts that it names are found.

In the order of reading:

    sections, role_sections, ranges, sampling_ranges
                                     every setting with its type, range, default and meaning; RunConfig is all of it
    loader                           from files, environment and `--set` to a checked RunConfig
    secrets                          how keys and passwords are kept out of everything that is written down
    parts.registry                   the one lookup of parts: a built-in name, or `module:Thing`
    parts.part_specs                 what others may know of a part before it is imported
    parts.part_names                 whether the parts that a run file names exist and fit together
    stages                           which batches belong to which `[[stages]]`
    aliases, toml_files              what settings are called elsewhere, and TOML with errors in words of the file

To add a setting: a field with a default in its section, and a line under it that says what it means; docs/generate.py
prints that line. Settings of a part stand in the part's own `Config`.
"""
