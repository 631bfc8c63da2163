"""Defaults of the fields in KFP's form: they start a first run without a run file.

All fields are texts, because KFP cannot leave a number empty, and its recurring runs send texts only. A test compares
these with `tidemill.steps.request.FIRST_RUN`, which holds the rest of that run.
"""

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
TRAIN = "reasoning_gym://chain_sum?seed=1&size=2000"
HELD_OUT = "reasoning_gym://chain_sum?seed=2&size=100"
REWARD = "reasoning_gym"
STEPS = "100"
GROUP_SIZE = "8"
LEARNING_RATE = "1e-6"
ENGINES = "1"
RANKS = "1"
GPU_HOURS = "8"
VARIANTS = "[trainer.learning_rate=1e-6, trainer.learning_rate=3e-6]"
