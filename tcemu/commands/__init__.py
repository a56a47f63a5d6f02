"""What each command of the command line does, one file a command; `cli` reads the words and answers for what is printed."""

TARGET = 'the GPU, as H100 or "RTX 4090" (tcemu list --gpus has them all), or its target, as sm_90a'
OP = 'a PTX spelling, or a short name such as f16, "e4m3 wgmma" or nvf4 (tcemu list --short has them all)'
EXAMPLE = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"  # what the help texts show each command with


class CommandError(Exception):
    """The user asked for something that cannot be done; the message says what would work. No traceback is shown."""
