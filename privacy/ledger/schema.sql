-- The hospital's privacy ledger: append-only, every change of state chained to the one before under a key outside it.
-- What counts is derived from the events alone; the other tables repeat it, and `silo ledger verify` compares them.
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
-- A collection of records is what has a budget; its data may come in several versions.
CREATE TABLE collection(
  name TEXT PRIMARY KEY, unit TEXT NOT NULL CHECK(unit IN('record','group','hospital')), created_at TEXT NOT NULL) STRICT;
CREATE TABLE dataset_version(
  fingerprint TEXT PRIMARY KEY, collection TEXT NOT NULL REFERENCES collection,
  records INTEGER NOT NULL, units INTEGER NOT NULL, registered_at TEXT NOT NULL) STRICT;
-- Keyed digests of units and of their contents, so that one unit cannot stand in two collections and be paid for once.
CREATE TABLE unit_digest(
  digest BLOB PRIMARY KEY, collection TEXT NOT NULL REFERENCES collection) STRICT, WITHOUT ROWID;
-- The newest row of a collection is in force.
CREATE TABLE budget(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, collection TEXT NOT NULL REFERENCES collection,
  epsilon REAL NOT NULL CHECK(epsilon>0), delta REAL NOT NULL CHECK(delta>0 AND delta<1e-3), filter_order REAL NOT NULL,
  operator TEXT NOT NULL, reason TEXT NOT NULL, created_at TEXT NOT NULL) STRICT;
-- One planned release, usually one round of one run.
CREATE TABLE entry(
  id TEXT PRIMARY KEY, collection TEXT NOT NULL REFERENCES collection,
  fingerprint TEXT NOT NULL REFERENCES dataset_version, run TEXT NOT NULL, manifest TEXT NOT NULL,
  round INTEGER NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL, created_at TEXT NOT NULL,
  UNIQUE(run, round, attempt, kind, collection)) STRICT;
CREATE TABLE mechanism(
  entry TEXT NOT NULL REFERENCES entry, idx INTEGER NOT NULL, purpose TEXT NOT NULL,
  noise REAL NOT NULL CHECK(noise>=0), rate REAL NOT NULL CHECK(rate>0 AND rate<=1),
  steps INTEGER NOT NULL CHECK(steps>0), PRIMARY KEY(entry, idx)) STRICT;
CREATE TABLE event(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, entry TEXT REFERENCES entry, subject TEXT NOT NULL,
  state TEXT NOT NULL CHECK(state IN
    ('INTENT','RUNNING','SPENT','SPENT_ON_RECOVERY','REFUSED','RELEASED_UNUSED','BUDGET','REGISTERED','RESTORED',
     'KEPT','MIGRATED')),
  detail TEXT NOT NULL, prev_hash TEXT NOT NULL, hash TEXT NOT NULL, created_at TEXT NOT NULL) STRICT;
-- What is released once per version of the data and then used by every run: paid for once, kept for ever.
CREATE TABLE kept(
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, created_at TEXT NOT NULL,
  PRIMARY KEY(fingerprint, name)) STRICT;
CREATE VIEW entry_state AS
  SELECT e.*, (SELECT state FROM event v WHERE v.entry=e.id ORDER BY seq DESC LIMIT 1) AS state FROM entry e;
-- Whatever was not refused, or given back unused, counts, however it ended.
CREATE VIEW charged AS
  SELECT s.collection, m.noise, m.rate, SUM(m.steps) AS steps FROM entry_state s JOIN mechanism m ON m.entry=s.id
  WHERE s.state IN('INTENT','RUNNING','SPENT','SPENT_ON_RECOVERY') GROUP BY 1,2,3;
CREATE TRIGGER event_noupd BEFORE UPDATE ON event BEGIN SELECT RAISE(ABORT,'event is append-only'); END;
CREATE TRIGGER event_nodel BEFORE DELETE ON event BEGIN SELECT RAISE(ABORT,'event is append-only'); END;
CREATE TRIGGER entry_noupd BEFORE UPDATE ON entry BEGIN SELECT RAISE(ABORT,'entry is append-only'); END;
CREATE TRIGGER entry_nodel BEFORE DELETE ON entry BEGIN SELECT RAISE(ABORT,'entry is append-only'); END;
CREATE TRIGGER mechanism_noupd BEFORE UPDATE ON mechanism BEGIN SELECT RAISE(ABORT,'mechanism is append-only'); END;
CREATE TRIGGER mechanism_nodel BEFORE DELETE ON mechanism BEGIN SELECT RAISE(ABORT,'mechanism is append-only'); END;
CREATE TRIGGER budget_noupd BEFORE UPDATE ON budget BEGIN SELECT RAISE(ABORT,'budget is append-only'); END;
CREATE TRIGGER budget_nodel BEFORE DELETE ON budget BEGIN SELECT RAISE(ABORT,'budget is append-only'); END;
CREATE TRIGGER kept_noupd BEFORE UPDATE ON kept BEGIN SELECT RAISE(ABORT,'kept is append-only'); END;
CREATE TRIGGER kept_nodel BEFORE DELETE ON kept BEGIN SELECT RAISE(ABORT,'kept is append-only'); END;
CREATE TRIGGER event_transition BEFORE INSERT ON event WHEN NEW.entry IS NOT NULL AND NOT EXISTS(
  SELECT 1 FROM (
    SELECT coalesce((SELECT state FROM event WHERE entry=NEW.entry ORDER BY seq DESC LIMIT 1),'') AS old)
  WHERE (old='' AND NEW.state IN('INTENT','REFUSED'))
     OR (old='INTENT' AND NEW.state IN('RUNNING','RELEASED_UNUSED','SPENT_ON_RECOVERY'))
     OR (old='RUNNING' AND NEW.state IN('SPENT','SPENT_ON_RECOVERY')))
  BEGIN SELECT RAISE(ABORT,'illegal ledger transition'); END;
