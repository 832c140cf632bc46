"""Composition roots: one short module per role, whose `build(context)` picks the parts that the run file names.

Nothing is imported here. The declaration of each role names its module (`RoleSpec.build`).
"""
