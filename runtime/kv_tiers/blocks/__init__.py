"""Where blocks lie: files of a directory, main memory, the memory of other machines."""
