"""The training side: packing, advantages, losses, the policy and its steps."""
