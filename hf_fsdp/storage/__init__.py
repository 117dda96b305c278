"""Files that outlive a crash: safetensors written and read a piece at a time, hashes, fsync, names that stay inside."""
