"""The Rollout Scheduler, on the controller's side: which task comes next, which engine serves a sample, and which groups
form the batch of a step."""
