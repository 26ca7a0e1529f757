"""Child processes for code that may hang, crash or use up memory, such as environments and graders.

`pool` keeps a number of them running; `managed_process` is the parent's side of one, `child_main` the child's, and
`framing` the messages between them. The child imports little, because every replacement of a killed process repeats the
imports. `structured_gather` runs coroutines concurrently."""
