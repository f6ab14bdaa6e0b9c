"""Units, sysusers.d and tmpfiles.d as templates; `paceline install-units` fills in @paceline@, @user@, ... (unitfiles.py)."""
