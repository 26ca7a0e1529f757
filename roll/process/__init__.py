"""A process of its own for code that may hang, die or take all memory: environments and graders run in such.

`process` is the parent's side, `inside` the child's, `frames` what goes between them. The child imports little, because
every replacement of a killed process pays for it. `together` starts several, or runs anything else side by side.
"""
