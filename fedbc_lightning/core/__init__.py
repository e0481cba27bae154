"""Basic tools that every other folder may use: errors, checks, units, files, random numbers, devices and names."""
