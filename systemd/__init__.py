"""Units, sysusers.d and tmpfiles.d as templates; `paceline install-units` fills in their @marks@."""
