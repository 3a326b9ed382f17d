"""The papers' figures and tables on embedded data: what each paper reports, beside what natgrad does here."""
