"""What everything else may use: errors, checks, units, files, random numbers, devices and names."""
