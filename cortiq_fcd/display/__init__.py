"""What a terminal shows; stages know only `cortiq_fcd.events.Listener`."""
