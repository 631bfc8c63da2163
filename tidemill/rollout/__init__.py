"""The rollout side: prompts, admission, engines, rewards, groups."""
