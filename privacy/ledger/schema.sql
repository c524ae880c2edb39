-- The hospital's privacy ledger: append-only, every change of state chained to the one before under a key outside it.
-- What counts is derived from the events alone; the views show the same to readers with other tools.
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE event(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, entry TEXT, subject TEXT NOT NULL,
  state TEXT NOT NULL CHECK(state IN
    ('INTENT','RUNNING','SPENT','SPENT_ON_RECOVERY','REFUSED','RELEASED_UNUSED','BUDGET','REGISTERED','RESTORED',
     'KEPT','MIGRATED')),
  detail TEXT NOT NULL, prev_hash TEXT NOT NULL, hash TEXT NOT NULL, created_at TEXT NOT NULL) STRICT;
-- Keyed digests of units and of their contents, so that one unit cannot stand in two collections and be paid for once.
-- The digest of a collection's digests is in the event of its registration.
CREATE TABLE unit_digest(digest BLOB PRIMARY KEY, collection TEXT NOT NULL) STRICT, WITHOUT ROWID;
-- A collection of records is what has a budget; its data may come in several versions.
CREATE VIEW collection AS
  SELECT subject AS name, json_extract(detail,'$.unit') AS unit, created_at FROM event
  WHERE seq IN(SELECT min(seq) FROM event WHERE state='REGISTERED' GROUP BY subject);
CREATE VIEW dataset_version AS
  SELECT json_extract(detail,'$.fingerprint') AS fingerprint, subject AS collection,
    json_extract(detail,'$.records') AS records, json_extract(detail,'$.units') AS units, created_at AS registered_at
  FROM event WHERE seq IN(
    SELECT min(seq) FROM event WHERE state='REGISTERED' GROUP BY json_extract(detail,'$.fingerprint'));
-- The newest row of a collection is in force.
CREATE VIEW budget AS
  SELECT seq, subject AS collection, json_extract(detail,'$.epsilon') AS epsilon, json_extract(detail,'$.delta') AS delta,
    json_extract(detail,'$.order') AS filter_order, json_extract(detail,'$.operator') AS operator,
    json_extract(detail,'$.reason') AS reason, created_at
  FROM event WHERE state='BUDGET';
-- One planned release, usually one round of one run.
CREATE VIEW entry AS
  SELECT entry AS id, json_extract(detail,'$.collection') AS collection,
    json_extract(detail,'$.fingerprint') AS fingerprint, json_extract(detail,'$.run') AS run,
    json_extract(detail,'$.manifest') AS manifest, json_extract(detail,'$.round') AS round,
    json_extract(detail,'$.attempt') AS attempt, json_extract(detail,'$.kind') AS kind, created_at
  FROM event WHERE entry IS NOT NULL AND state IN('INTENT','REFUSED');
CREATE VIEW mechanism AS
  SELECT e.entry, m.key AS idx, json_extract(m.value,'$[0]') AS purpose, json_extract(m.value,'$[1]') AS noise,
    json_extract(m.value,'$[2]') AS rate, json_extract(m.value,'$[3]') AS steps
  FROM event e, json_each(e.detail,'$.mechanisms') m WHERE e.entry IS NOT NULL AND e.state IN('INTENT','REFUSED');
-- What is released once per version of the data and then used by every run: paid for once, kept for ever.
CREATE VIEW kept AS
  SELECT subject AS fingerprint, json_extract(detail,'$.name') AS name, json_extract(detail,'$.value') AS value, created_at
  FROM event WHERE state='KEPT';
CREATE VIEW entry_state AS
  SELECT e.*, (SELECT state FROM event v WHERE v.entry=e.id ORDER BY seq DESC LIMIT 1) AS state FROM entry e;
-- Whatever was not refused, or given back unused, counts, however it ended.
CREATE VIEW charged AS
  SELECT s.collection, m.noise, m.rate, SUM(m.steps) AS steps FROM entry_state s JOIN mechanism m ON m.entry=s.id
  WHERE s.state IN('INTENT','RUNNING','SPENT','SPENT_ON_RECOVERY') GROUP BY 1,2,3;
CREATE TRIGGER event_noupd BEFORE UPDATE ON event BEGIN SELECT RAISE(ABORT,'event is append-only'); END;
CREATE TRIGGER event_nodel BEFORE DELETE ON event BEGIN SELECT RAISE(ABORT,'event is append-only'); END;
CREATE TRIGGER event_transition BEFORE INSERT ON event WHEN NEW.entry IS NOT NULL AND NOT EXISTS(
  SELECT 1 FROM (
    SELECT coalesce((SELECT state FROM event WHERE entry=NEW.entry ORDER BY seq DESC LIMIT 1),'') AS old)
  WHERE (old='' AND NEW.state IN('INTENT','REFUSED'))
     OR (old='INTENT' AND NEW.state IN('RUNNING','RELEASED_UNUSED','SPENT_ON_RECOVERY'))
     OR (old='RUNNING' AND NEW.state IN('SPENT','SPENT_ON_RECOVERY')))
  BEGIN SELECT RAISE(ABORT,'illegal ledger transition'); END;
