"""From a free slot to a prompt group in the buffer. Never imports the trainer."""
