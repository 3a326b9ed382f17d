"""The scoreboard: natgrad's methods beside their rivals, each tuned with the same budget, on eight tasks."""
