"""The training pool: packs what the buffer holds, corrects it, and updates the policy."""
