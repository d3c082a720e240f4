"""What a lead may ask the server beside FLARE's own commands, by name: both sides have it."""

STATUS, STOP, RESULT, AGAIN = (f"fedmutual_{what}" for what in ("status", "stop", "result", "again"))
