"""The life of every sample: router, runner, scheduler, filters."""
