"""The rollout scheduler, on the controller's side: which task comes next, which engine serves a sample, and which groups
make the batch of a step."""
