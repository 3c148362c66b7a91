"""Said is done: counted bytes and collectives against the table of ZeRO."""
