"""What a running engine tells about itself."""
