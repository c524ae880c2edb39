BEGIN TRANSACTION;
CREATE TABLE budget(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, collection TEXT NOT NULL REFERENCES collection,
  epsilon REAL NOT NULL CHECK(epsilon>0), delta REAL NOT NULL CHECK(delta>0 AND delta<1e-3), filter_order REAL NOT NULL,
  operator TEXT NOT NULL, reason TEXT NOT NULL, created_at TEXT NOT NULL) STRICT;
INSERT INTO "budget" VALUES(1,'north/train',3.0,1.0e-05,9.1,'dpo','yearly budget','2026-11-23T19:17:15.865854+00:00');
CREATE TABLE collection(
  name TEXT PRIMARY KEY, unit TEXT NOT NULL CHECK(unit IN('record','group','hospital')), created_at TEXT NOT NULL) STRICT;
INSERT INTO "collection" VALUES('north/train','record','2026-11-23T19:17:15.825183+00:00');
CREATE TABLE dataset_version(
  fingerprint TEXT PRIMARY KEY, collection TEXT NOT NULL REFERENCES collection,
  records INTEGER NOT NULL, units INTEGER NOT NULL, registered_at TEXT NOT NULL) STRICT;
INSERT INTO "dataset_version" VALUES('ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','north/train',3,3,'2026-11-23T19:17:15.825183+00:00');
CREATE TABLE entry(
  id TEXT PRIMARY KEY, collection TEXT NOT NULL REFERENCES collection,
  fingerprint TEXT NOT NULL REFERENCES dataset_version, run TEXT NOT NULL, manifest TEXT NOT NULL,
  round INTEGER NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL, created_at TEXT NOT NULL,
  UNIQUE(run, round, attempt, kind, collection)) STRICT;
INSERT INTO "entry" VALUES('run-1/0/train/0/north/train','north/train','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','run-1','mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm',0,0,'train','2026-11-23T19:17:26.998270+00:00');
INSERT INTO "entry" VALUES('run-1/1/train/0/north/train','north/train','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','run-1','mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm',1,0,'train','2026-11-23T19:17:27.121140+00:00');
INSERT INTO "entry" VALUES('run-1/2/train/0/north/train','north/train','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','run-1','mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm',2,0,'train','2026-11-23T19:17:27.254365+00:00');
INSERT INTO "entry" VALUES('run-1/3/train/0/north/train','north/train','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','run-1','mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm',3,0,'train','2026-11-23T19:17:27.337899+00:00');
INSERT INTO "entry" VALUES('run-1/4/train/0/north/train','north/train','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','run-1','mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm',4,0,'train','2026-11-23T19:17:27.431326+00:00');
CREATE TABLE event(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, entry TEXT REFERENCES entry, subject TEXT NOT NULL,
  state TEXT NOT NULL CHECK(state IN
    ('INTENT','RUNNING','SPENT','SPENT_ON_RECOVERY','REFUSED','RELEASED_UNUSED','BUDGET','REGISTERED','RESTORED',
     'KEPT','MIGRATED')),
  detail TEXT NOT NULL, prev_hash TEXT NOT NULL, hash TEXT NOT NULL, created_at TEXT NOT NULL) STRICT;
INSERT INTO "event" VALUES(1,NULL,'north/train','REGISTERED','{"fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "unit": "record", "records": 3, "units": 3, "digests": "ad58bdda62d7e28844bf0f110ac66d4be9723ab9f0c6f286f2e86a696aef2258"}','0000000000000000000000000000000000000000000000000000000000000000','f57892d75bbe4eb2228df5d601ac65cf8b893669853e739055da5ce12d3d57f6','2026-11-23T19:17:15.825183+00:00');
INSERT INTO "event" VALUES(2,NULL,'north/train','BUDGET','{"epsilon": 3.0, "delta": 1e-05, "order": 9.1, "operator": "dpo", "reason": "yearly budget"}','f57892d75bbe4eb2228df5d601ac65cf8b893669853e739055da5ce12d3d57f6','3eda43087d9ea671bd59ec097876b7842204154144e843e9f44510a14bd008c2','2026-11-23T19:17:15.865854+00:00');
INSERT INTO "event" VALUES(3,'run-1/0/train/0/north/train','run-1/0/train/0/north/train','INTENT','{"collection": "north/train", "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "run": "run-1", "manifest": "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm", "round": 0, "attempt": 0, "kind": "train", "owner": "e69238d279b32f4c45318ceae600d969", "mechanisms": [["training", 16.0, 0.5, 10]]}','3eda43087d9ea671bd59ec097876b7842204154144e843e9f44510a14bd008c2','3b0d16bc7df4362054a6e1fcb3bcb3275a730c72ea1046d98a7cf7649d282702','2026-11-23T19:17:26.998270+00:00');
INSERT INTO "event" VALUES(4,'run-1/0/train/0/north/train','run-1/0/train/0/north/train','RUNNING','','3b0d16bc7df4362054a6e1fcb3bcb3275a730c72ea1046d98a7cf7649d282702','87d29f353c911f4dda0ea186fd048a972ece7b2cdf931ce4dde7b455256f20d0','2026-11-23T19:17:27.049638+00:00');
INSERT INTO "event" VALUES(5,'run-1/0/train/0/north/train','run-1/0/train/0/north/train','SPENT','dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd','87d29f353c911f4dda0ea186fd048a972ece7b2cdf931ce4dde7b455256f20d0','3d3a1e45cb14b133f7fc0c55ac748efa5272ce0d13c72c5f0bf34294cf3894d5','2026-11-23T19:17:27.080056+00:00');
INSERT INTO "event" VALUES(6,'run-1/1/train/0/north/train','run-1/1/train/0/north/train','INTENT','{"collection": "north/train", "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "run": "run-1", "manifest": "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm", "round": 1, "attempt": 0, "kind": "train", "owner": "e69238d279b32f4c45318ceae600d969", "mechanisms": [["training", 16.0, 0.5, 10]]}','3d3a1e45cb14b133f7fc0c55ac748efa5272ce0d13c72c5f0bf34294cf3894d5','8fb9be47f65241fcee9010d8e92420b7202f47b81400fa9b47c3c412e500f751','2026-11-23T19:17:27.121140+00:00');
INSERT INTO "event" VALUES(7,'run-1/1/train/0/north/train','run-1/1/train/0/north/train','RUNNING','','8fb9be47f65241fcee9010d8e92420b7202f47b81400fa9b47c3c412e500f751','3e797511b7725e954679d2680ccb2cb82ecab937d166b8c710ae44a6bc0d56f3','2026-11-23T19:17:27.166066+00:00');
INSERT INTO "event" VALUES(8,'run-1/1/train/0/north/train','run-1/1/train/0/north/train','SPENT','dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd','3e797511b7725e954679d2680ccb2cb82ecab937d166b8c710ae44a6bc0d56f3','cc8a4dfd67bada0673d83517a6de74aa5513411de1fc8b3a5bd8168e02c6d018','2026-11-23T19:17:27.209815+00:00');
INSERT INTO "event" VALUES(9,'run-1/2/train/0/north/train','run-1/2/train/0/north/train','INTENT','{"collection": "north/train", "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "run": "run-1", "manifest": "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm", "round": 2, "attempt": 0, "kind": "train", "owner": "e69238d279b32f4c45318ceae600d969", "mechanisms": [["training", 16.0, 0.5, 10]]}','cc8a4dfd67bada0673d83517a6de74aa5513411de1fc8b3a5bd8168e02c6d018','034b9fe4e425874debcf396760e6aa32d0ca09810c2cedb4be5e8e217f26a8c3','2026-11-23T19:17:27.254365+00:00');
INSERT INTO "event" VALUES(10,'run-1/2/train/0/north/train','run-1/2/train/0/north/train','RUNNING','','034b9fe4e425874debcf396760e6aa32d0ca09810c2cedb4be5e8e217f26a8c3','f487541b9dab956c167fe4d1855fd21fcc535d590cc8f81dbee0e9f134f1512a','2026-11-23T19:17:27.301565+00:00');
INSERT INTO "event" VALUES(11,'run-1/3/train/0/north/train','run-1/3/train/0/north/train','INTENT','{"collection": "north/train", "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "run": "run-1", "manifest": "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm", "round": 3, "attempt": 0, "kind": "train", "owner": "e69238d279b32f4c45318ceae600d969", "mechanisms": [["training", 16.0, 0.5, 10]]}','f487541b9dab956c167fe4d1855fd21fcc535d590cc8f81dbee0e9f134f1512a','f4e126d14167d7f97b1b622821773b0b1a766a1cac73f7948dae2009c3046b16','2026-11-23T19:17:27.337899+00:00');
INSERT INTO "event" VALUES(12,'run-1/3/train/0/north/train','run-1/3/train/0/north/train','RELEASED_UNUSED','released by the operator','f4e126d14167d7f97b1b622821773b0b1a766a1cac73f7948dae2009c3046b16','b17f304eb41e2448e44fdfae6033a8316be0831a78f36ab0f622afbce2dff111','2026-11-23T19:17:27.389956+00:00');
INSERT INTO "event" VALUES(13,'run-1/4/train/0/north/train','run-1/4/train/0/north/train','REFUSED','{"collection": "north/train", "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "run": "run-1", "manifest": "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm", "round": 4, "attempt": 0, "kind": "train", "owner": "e69238d279b32f4c45318ceae600d969", "mechanisms": [["training", 0.1, 1.0, 10]]}','b17f304eb41e2448e44fdfae6033a8316be0831a78f36ab0f622afbce2dff111','ff59de647ce1668eb9584ccfecef97afc90af427b1ab1032b38c8019a8c7e4ad','2026-11-23T19:17:27.431326+00:00');
INSERT INTO "event" VALUES(14,NULL,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','KEPT','{"name": "class counts", "value": "[1.0, 2.0]"}','ff59de647ce1668eb9584ccfecef97afc90af427b1ab1032b38c8019a8c7e4ad','49cf545e4e7bdb7c383d8abfc34bd018bc24954a37929e44860f22e70b67b71b','2026-11-23T19:17:27.475809+00:00');
CREATE TABLE kept(
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, created_at TEXT NOT NULL,
  PRIMARY KEY(fingerprint, name)) STRICT;
INSERT INTO "kept" VALUES('ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','class counts','[1.0, 2.0]','2026-11-23T19:17:27.475809+00:00');
CREATE TABLE mechanism(
  entry TEXT NOT NULL REFERENCES entry, idx INTEGER NOT NULL, purpose TEXT NOT NULL,
  noise REAL NOT NULL CHECK(noise>=0), rate REAL NOT NULL CHECK(rate>0 AND rate<=1),
  steps INTEGER NOT NULL CHECK(steps>0), PRIMARY KEY(entry, idx)) STRICT;
INSERT INTO "mechanism" VALUES('run-1/0/train/0/north/train',0,'training',16.0,0.5,10);
INSERT INTO "mechanism" VALUES('run-1/1/train/0/north/train',0,'training',16.0,0.5,10);
INSERT INTO "mechanism" VALUES('run-1/2/train/0/north/train',0,'training',16.0,0.5,10);
INSERT INTO "mechanism" VALUES('run-1/3/train/0/north/train',0,'training',16.0,0.5,10);
INSERT INTO "mechanism" VALUES('run-1/4/train/0/north/train',0,'training',0.1,1.0,10);
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
INSERT INTO "meta" VALUES('schema_version','2');
INSERT INTO "meta" VALUES('ledger_id','b16a366f6132649e70117db066eef870');
INSERT INTO "meta" VALUES('key','72dabc141ea2e89a79530fdc7f8150324e713c528df99977e6ceffa32df7aac8');
INSERT INTO "meta" VALUES('unkeyed','0');
CREATE TABLE unit_digest(
  digest BLOB PRIMARY KEY, collection TEXT NOT NULL REFERENCES collection) STRICT, WITHOUT ROWID;
INSERT INTO "unit_digest" VALUES(X'53CD823D4B0810250528A618CD8262B285CB19CD57EA6CC85E3912568FD20B15','north/train');
INSERT INTO "unit_digest" VALUES(X'63E8C03DBFAE4E6D8939C40C884BBE2584EBBE09E3B3868B91437847768104DC','north/train');
INSERT INTO "unit_digest" VALUES(X'8345ABC99B099C1F2D90ACD7D6CA30B31B7F24263BC14548BFB02E007CE50D1A','north/train');
CREATE VIEW entry_state AS
  SELECT e.*, (SELECT state FROM event v WHERE v.entry=e.id ORDER BY seq DESC LIMIT 1) AS state FROM entry e;
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
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('event',14);
INSERT INTO "sqlite_sequence" VALUES('budget',1);
COMMIT;
