"""The rollout workers, which drive samples through engines, environments and graders."""
