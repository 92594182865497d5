"""What options accept and where they stand if nobody says otherwise, where more than one layer has to know it."""

# How files are read; "auto" maps them except on network and FUSE file systems.
READ_MODES = ("auto", "mmap", "pread")

# The most that one compressed body may become: a bomb is an error, not a memory problem. RocketMQ's largest message
# has 4 MiB by default.
MAX_DECOMPRESSED_BYTES = 64 << 20
