"""What a server has to bear: crowds, kills, nonsense, long conversations."""
